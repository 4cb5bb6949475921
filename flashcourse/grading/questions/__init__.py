"""The graded questions, one a file: checks, and next to them the known mistakes."""
