"""Real tasks: data of others, pretrained models, and the results they are held against."""
