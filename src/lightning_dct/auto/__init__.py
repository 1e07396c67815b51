"""A run that sets itself: the least lossy settings whose step stays near one without synchronisation.

    ladder      the settings to choose from, from what loses least to what loses most, and the rule
    predicting  how long a step takes with each, by the model of ``lightning-dct plan``

:class:`~lightning_dct.callbacks.AutoSettings` does this while a run trains.
"""
