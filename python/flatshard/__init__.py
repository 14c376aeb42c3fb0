"""Sharded training in C."""
