"""The test suite, in the folders of the package: what tests superoffload/engine lies in tests/engine.

kernels/ tests csrc, links/cuda/ runs over a fake driver and gpu/ over a real one, project/ tests packaging,
documentation and benchmarks. simulator/ and fuzz/ are programs with a test each. What tests share lies in support/: no
test imports another. All of it is a package, so that helpers have one name however the tests are started.
"""
