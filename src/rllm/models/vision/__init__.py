"""Models that read images: files to pixels, pixels to the vectors that stand in a row of tokens."""
