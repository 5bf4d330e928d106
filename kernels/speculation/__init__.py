"""Attention-level speculation on the device: roles, verdict, handover (ALSpec, Algorithm 2)."""
