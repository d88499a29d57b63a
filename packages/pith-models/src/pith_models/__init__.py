"""Model families, one self-contained file each."""
