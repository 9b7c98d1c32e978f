"""Put new weights into an exported program."""
