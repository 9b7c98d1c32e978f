"""The command line: options become one call of the library, its result one report."""
