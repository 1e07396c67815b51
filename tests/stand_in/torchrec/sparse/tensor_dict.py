def maybe_td_to_kjt(features, keys=None):
    return features
