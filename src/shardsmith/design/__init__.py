"""The thinking wing: everything computed about a plan without torch."""
