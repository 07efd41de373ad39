"""From the history of norms, carries and moments to thresholds that find themselves."""
