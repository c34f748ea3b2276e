"""The test suite. A package, so that tests share helpers and the reference under one name however they are started."""
