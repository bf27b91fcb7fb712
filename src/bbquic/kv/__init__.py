"""Keys and values: where they lie, and attention over them where they lie."""
