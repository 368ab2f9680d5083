"""From a planned module to Python text: what the library runs and what a file carries."""
