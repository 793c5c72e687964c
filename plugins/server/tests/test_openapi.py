"""The OpenAPI document describes every route and every field."""

from dovetail_server.protocol.fields import ChatRequest, CompletionRequest


def test_the_document_has_every_route_and_field(server):
    document = server.get("/openapi.json").json
    schemas = document["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.__struct_fields__)
    for path, operations in document["paths"].items():
        for method in operations:
            actual = server.send(method.upper(), path.replace("{name}", "demo"), "")
            assert actual.status not in (404, 405), (method, path)
    assert {"/v1/completions", "/v1/models/{name}", "/live"} <= document["paths"].keys()
