"""Other libraries in one line; each module needs its library, and nothing here imports one before it is used."""
