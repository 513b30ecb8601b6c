"""Hugging Face's evaluate, for its examples: accuracy alone, whose code the package downloads."""

import numpy


class Accuracy:
    def compute(self, predictions, references):
        return {"accuracy": float(numpy.mean(numpy.asarray(predictions) == numpy.asarray(references)))}


def load(name, cache_dir=None):
    assert name == "accuracy"
    return Accuracy()
