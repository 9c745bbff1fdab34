"""Who goes next among waiting requests: policies, and what they are made of."""
