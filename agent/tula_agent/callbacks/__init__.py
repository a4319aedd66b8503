"""Callbacks for training frameworks. Each module imports its framework, so a script imports only the one it uses."""
