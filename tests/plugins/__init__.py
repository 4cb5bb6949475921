"""pytest plugins of this project, found through `pythonpath` in pyproject.toml."""
