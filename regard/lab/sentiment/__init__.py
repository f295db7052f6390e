"""Encoders that judge sentences."""
