"""Which parameter an optimizer's ids mean, and how its state moves from one order or naming to another."""
