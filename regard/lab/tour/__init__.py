"""All of regard in one report: check, train, see, race."""
