"""Four gloo ranks that live as long as the test session; smaller meshes take the first of them."""

from tests.pool import pool_of

ranks = pool_of(4, "session")
