"""Caster: a scikit-learn classifier that transports features, built on `caster.core`."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
from array_api_compat import is_array_api_obj, is_numpy_array
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import column_or_1d, validate_data

from caster import state as states
from caster.adapt.feature_transport import FeatureTransport
from caster.adapt.source_moments import Chunks, fit_moments
from caster.config import Settings
from caster.core.adaptation import Adaptation
from caster.core.arrays import check_dense
from caster.core.linalg import Array
from caster.errors import CasterError, InputTypeError
from caster.io.labels import Labels, as_labels, unique_labels
from caster.io.signed_tensors import Key
from caster.state import State

NUMBERS: dict[str, Any] = {"dtype": [np.float64, np.float32], "ensure_all_finite": False}
CONSTANTS = tuple(constant.name for constant in fields(Settings))


class Caster(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Class-shared affine statistics transport with a certificate.

    Fit once on the features of a frozen model for labelled source data; then adapt batch by batch.
    The map is estimated from the batch, so predictions depend on the other samples in it.

    Parameters
    ----------
    k_max : largest number of retained directions of the discriminative subspace.
    lam, beta : shrinkage of the map's covariances, ridge of the class covariances.
    tau : largest accepted certificate.
    confidence : probability that a sample must exceed to count in the certificate.
    min_samples, min_classes : smallest number of such samples, and of the classes they occupy.
    eps : keeps the certificate finite if two class means coincide.
    safeguards : reject batches that the certificate is known to accept in error: every batch if
        Source-GDA or transport is clearly less accurate than the head on the source itself
        ("source_check"), and batches whose classes come in runs or are too few ("class_order").
        False uses the paper's gate alone.

    Attributes
    ----------
    classes_ : the labels, in the order of all scores and counts.
    moments_ : `SourceMoments` of the source, in NumPy float32 as in the state file.
    source_check_ : `SourceCheck`, cross-validated accuracies on the source.
    sketch_ : `Sketch` of the source for the monitor, or None.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(3, size=600)
    >>> features = rng.normal(size=(600, 8)) + 6 * np.eye(3, 8)[labels]
    >>> clf = Caster().fit(features, labels)
    >>> shifted = 1.5 * features[:64] + 2.0
    >>> out = clf.adapt(shifted)
    >>> out.verdict.reason, float(np.mean(out.labels == labels[:64]))
    ('accepted', 1.0)
    """

    def __init__(
        self,
        k_max: int = Settings.k_max,
        lam: float = Settings.lam,
        beta: float = Settings.beta,
        tau: float = Settings.tau,
        confidence: float = Settings.confidence,
        min_samples: int = Settings.min_samples,
        min_classes: int = Settings.min_classes,
        eps: float = Settings.eps,
        safeguards: bool = Settings.safeguards,
    ) -> None:
        self.k_max = k_max
        self.lam = lam
        self.beta = beta
        self.tau = tau
        self.confidence = confidence
        self.min_samples = min_samples
        self.min_classes = min_classes
        self.eps = eps
        self.safeguards = safeguards

    @property
    def settings(self) -> Settings:
        """The validated parameters."""
        values = tuple([getattr(self, name) for name in CONSTANTS])
        try:
            return _checked(*values)
        except TypeError:  # an unhashable value is no number: Settings raises the error
            return Settings(*values)

    def fit(
        self,
        X: Any,  # (N, d)
        y: Any,  # (N,), labels of any hashable kind
        head_logits: Any = None,  # (N, C), columns in the order of the sorted labels
        *,
        sketch: bool = False,
    ) -> Self:
        """Fit source moments from arrays in memory.

        With the frozen head's logits, the fit compares the accuracy of transport on the source with
        the head's; transport is off by default if it is clearly lower. `sketch` stores some source
        samples in the state, with which the monitor compares streams: see docs/monitoring.md.
        """
        if y is None:
            raise CasterError("Caster requires y to be passed, but the target y is None")
        self.__dict__.pop("feature_names_in_", None)  # from an earlier fit
        if not is_array_api_obj(X) or is_numpy_array(X):
            X = self._validated(X)
        labels = as_labels(_raveled(y))
        chunk = (X, labels) if head_logits is None else (X, labels, head_logits)
        return self._fit([chunk], unique_labels(labels), sketch)

    def fit_stream(
        self,
        chunks: Chunks,
        classes: Any,
        *,
        sketch: bool = False,
    ) -> Self:
        """Fit from chunks of (features, labels[, logits]), which are read twice and not stored.

        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> y = np.repeat([0, 1], 50)
        >>> X = rng.normal(size=(100, 4)) + y[:, None]
        >>> chunks = [(X[i : i + 10], y[i : i + 10]) for i in range(0, 100, 10)]
        >>> streamed = Caster().fit_stream(chunks, classes=[0, 1])
        >>> bool(np.allclose(streamed.moments_.means, Caster().fit(X, y).moments_.means, atol=1e-5))
        True
        """
        self.__dict__.pop("feature_names_in_", None)  # from an earlier fit; chunks have no names
        return self._fit(chunks, as_labels(classes), sketch)

    def _fit(self, chunks: Chunks, classes: Labels, sketch: bool) -> Self:
        settings = self.settings
        moments, check, drawn = fit_moments(chunks, classes, settings, sketch)
        return self._adopt(State(moments, classes, settings, source_check=check, sketch=drawn))

    def adapt(
        self,
        batch: Any,  # (B, d)
        head_logits: Any = None,  # (B, C), columns in the order of classes_
    ) -> Adaptation:
        """Transport the source to one target batch, with a verdict.

        Takes NumPy, torch, CuPy or JAX arrays and returns the same kind on the same device; labels
        that are not numbers are returned as a NumPy array. Without `head_logits`, a rejected batch
        falls back to Source-GDA. A batch of one sample has no map: its verdict is
        "batch_too_small", its scores are the log priors and its proposal is the fallback. The same
        holds if a step fails numerically, with the verdict "numerical".

        >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], [0, 0, 1, 1])
        >>> clf.adapt([[0.5], [4.5]], head_logits=[[2.0, 1.0], [0.0, 3.0]]).verdict.reason
        'min_samples'
        """
        return self.transport.adapt(self._named(batch), head_logits, self.settings)

    def predict(
        self,
        X: Any,  # (B, d), one batch
        head_logits: Any = None,  # (B, C)
    ) -> Array:  # (B,)
        """Predict labels of one batch: transported if accepted, else the fallback's.

        >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], [0, 0, 1, 1])
        >>> clf.predict([[0.5], [4.5]])
        array([0, 1])
        """
        return self._answered(X, head_logits).labels

    def predict_proba(
        self,
        X: Any,  # (B, d), one batch
        head_logits: Any = None,  # (B, C)
    ) -> Array:  # (B, C)
        """Predict probabilities of one batch: softmax of the scores used by `predict`.

        These are transported scores if the batch is accepted, else `head_logits` or, without them,
        the scores of Source-GDA.

        >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], [0, 0, 1, 1])
        >>> clf.predict_proba([[0.5], [4.5]], head_logits=[[2.0, 1.0], [0.0, 3.0]]).round(2)
        array([[0.73, 0.27],
               [0.05, 0.95]])
        """
        return self._answered(X, head_logits).probabilities

    def decision_function(
        self,
        X: Any,  # (B, d), one batch
        head_logits: Any = None,  # (B, C)
    ) -> Array:  # (B, C); with two classes (B,), the second's score less the first's
        """Scores used by `predict`, in scikit-learn's shape.

        >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], [0, 0, 1, 1])
        >>> clf.decision_function([[0.5], [4.5]], head_logits=[[2.0, 1.0], [0.0, 3.0]])
        array([-1.,  3.])
        """
        scores = self._answered(X, head_logits).scores
        return scores if scores.shape[1] > 2 else scores[:, 1] - scores[:, 0]

    def _answered(self, X: Any, head_logits: Any) -> Adaptation:
        """`adapt`, with scikit-learn's validation of NumPy input."""
        self._check_fitted()
        if not is_array_api_obj(X) or is_numpy_array(X):
            X = self._validated(X, reset=False)
        return self.adapt(X, head_logits)

    def source_scores(self, batch: Any) -> Array:  # (B, d) -> (B, C)
        """Source-GDA: the untransported Gaussian discriminant in all retained directions.

        A row whose scores overflow its dtype gets the log priors.

        >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], [0, 0, 1, 1])
        >>> clf.source_scores([[0.5], [4.5]]).argmax(axis=1)
        array([0, 1])
        """
        return self.transport.source_scores(self._named(batch), self.settings)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model_sha256: str | None = None,
        preprocessing_sha256: str | None = None,
        key: Key | None = None,
    ) -> None:
        """Write a state file, bound to the digests of model and preprocessing.

        A loaded estimator keeps its digests unless others are given. With a `key`, bytes or the
        path of a key file, the file is signed: see docs/state-file.md.

        >>> import tempfile, pathlib
        >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], ["low", "low", "high", "high"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     clf.save(pathlib.Path(folder) / "model.caster")
        ...     load(pathlib.Path(folder) / "model.caster").classes_.tolist()
        ['high', 'low']
        """
        self._check_fitted()
        _check_kinds(path, model_sha256, preprocessing_sha256)
        fitted = self._state.settings  # the moments were computed with its k_max
        now = replace(self.settings, k_max=fitted.k_max)
        state = replace(
            self._state,
            settings=now,
            model_sha256=model_sha256 or self._state.model_sha256,
            preprocessing_sha256=preprocessing_sha256 or self._state.preprocessing_sha256,
        )
        states.save(state, path, key)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Restore a fitted estimator."""
        return cls(**vars(state.settings))._adopt(state)

    @property
    def transport(self) -> FeatureTransport:
        """The transport that `adapt` applies, with its single steps."""
        self._check_fitted()
        return self._transport

    def _adopt(self, state: State) -> Self:
        self._state = state
        self.moments_, self.classes_ = state.moments, state.classes
        self.source_check_ = state.source_check
        self.sketch_ = state.sketch
        self.n_features_in_ = int(state.moments.U.shape[0])
        self._transport = FeatureTransport(state.moments, state.classes, state.supports_transport)
        return self

    def _check_fitted(self) -> None:
        if not hasattr(self, "moments_"):
            raise NotFittedError("this Caster is not fitted yet: call fit, or use caster.load")

    def _named(self, batch: Any) -> Any:
        """Validate a data frame's column names; leave other batches unchanged."""
        if hasattr(batch, "columns"):
            return self._validated(batch, reset=False)
        return batch

    def _validated(self, X: Any, reset: bool = True) -> Any:
        """Validate X as scikit-learn does, with its messages."""
        check_dense(X)
        dtypes: Any = getattr(X, "dtypes", getattr(X, "dtype", None))  # data frame, array
        for dtype in np.atleast_1d(dtypes):
            if getattr(dtype, "kind", "f") in "cmMV":  # scikit-learn accepts times as numbers
                problem = "Complex data not supported" if dtype.kind == "c" else "Not numbers"
                raise CasterError(f"{problem}: features must be real numbers, not {dtype}")
        try:
            with np.errstate(over="ignore"):
                return validate_data(self, X, reset=reset, **NUMBERS)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            kind = InputTypeError if isinstance(error, TypeError) else CasterError
            raise kind(_one_line(str(error))) from None


@lru_cache(typed=True)  # typed, because True equals 1 but is not accepted as a number
def _checked(*values: Any) -> Settings:
    return Settings(*values)


def _raveled(y: Any) -> Any:
    """Ravel a column of labels, with scikit-learn's warning."""
    check_dense(y)
    try:
        return column_or_1d(y, warn=True) if getattr(y, "ndim", 1) == 2 and y.shape[1] == 1 else y
    except ValueError as error:
        raise CasterError(_one_line(str(error))) from None


def _one_line(message: str) -> str:
    """Remove the array that scikit-learn prints below the first line of a message."""
    if "feature names" in message:  # scikit-learn's estimator checks expect all lines
        return message
    first, *rest = message.strip().split("\n")
    return f"{first} {rest[-1]}" if rest and not rest[-1].endswith("]") else first


def _check_kinds(path: object, *digests: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise CasterError(f"expected the path of a state file, not {type(path).__name__}")
    for digest in digests:
        if not isinstance(digest, str | None):
            raise CasterError(f"a digest is hexadecimal text, not {type(digest).__name__}")


def load(
    path: str | os.PathLike[str],
    *,
    model_sha256: str | None = None,
    preprocessing_sha256: str | None = None,
    key: Key | None = None,
) -> Caster:
    """Load a fitted `Caster` from its state file, and check any digests given.

    With a `key`, bytes or the path of a key file, the file must be signed with it.
    """
    _check_kinds(path, model_sha256, preprocessing_sha256)
    state = states.load(path, key)
    if model_sha256 is not None:
        state.check_model(model_sha256)
    if preprocessing_sha256 is not None:
        state.check_preprocessing(preprocessing_sha256)
    return Caster.from_state(state)
