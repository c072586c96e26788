"""`scripts/demo`: what the product is for, to the eye, on the lab. Standard library only."""
