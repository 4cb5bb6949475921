"""Loads the test suite's own pytest plugins. Each has one job and lives in tests/plugins/."""

pytest_plugins = ["plugins.machine", "plugins.nbval_guard", "plugins.workers"]
