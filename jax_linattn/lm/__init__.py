"""A causal character language model: data, model, training and generation. Needs the extra `lm`."""
