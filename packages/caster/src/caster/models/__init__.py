"""What a frozen model gives: features, and logits where there are any."""
