"""Every reader on inputs that nobody would write: the answer is a value or a `CkptError`, soon, and nothing runs."""
