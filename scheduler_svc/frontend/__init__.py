"""The gRPC side: validates, tokenises, renders, detokenises, matches stop strings. Knows no blocks, rows or devices."""
