"""Fits heads on the states of a frozen body, with their controls."""
