"""These tests need another library than the project's own venv has: ``make test-peers`` runs them.

Each is run by name in the venv of its library, so it is left out when a whole folder is collected.
"""

collect_ignore_glob = ["test_*.py"]
