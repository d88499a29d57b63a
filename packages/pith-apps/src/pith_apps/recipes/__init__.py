"""Recipes: one file each, and `load.py`, which finds them."""
