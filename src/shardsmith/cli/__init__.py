"""The command line: one file a verb, all of them thin over `shardsmith.api`."""
