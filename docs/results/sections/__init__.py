"""Sections of README.md and tables of other pages, each of one kind of rows, for tables.py and pictures.py."""
