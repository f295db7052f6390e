"""Encoder-decoders on articles and summaries."""
