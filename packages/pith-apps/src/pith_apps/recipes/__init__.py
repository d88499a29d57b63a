"""Recipes, and `load.py`, which finds them."""
