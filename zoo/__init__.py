"""The embedded demo family: the recipe that trains it, and its weights."""
