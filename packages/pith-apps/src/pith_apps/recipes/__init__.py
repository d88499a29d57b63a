"""Recipes: a file for each family, and `load.py`, which finds them."""
