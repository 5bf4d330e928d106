"""Elementwise operations of prompt processing."""
