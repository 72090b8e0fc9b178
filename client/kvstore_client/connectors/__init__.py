"""Connectors for engines, one module each; a module imports its engine, and nothing else does."""
