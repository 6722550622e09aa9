"""The layers that made a recorded query, key, value and output, found by their numbers among the layers that ran."""
