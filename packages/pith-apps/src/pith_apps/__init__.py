"""What a user runs: the pith command, recipes, data, loops."""
