"""The measurements of launch/evaluate.py."""
