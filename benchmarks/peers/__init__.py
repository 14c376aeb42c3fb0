"""What a user would pick instead; each file needs its library and is only loaded where it is."""
