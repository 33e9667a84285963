"""When each stage works: actions, orders, lowering, checking."""
