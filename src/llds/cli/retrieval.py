"""``llds index``, ``llds serve`` and ``llds search``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

Folder = Annotated[str, typer.Argument(metavar="INDEX", help="The index folder.")]
MODE_HELP = "bm25, dense, hybrid; auto is hybrid where the index has vectors, else bm25."
RERANK_HELP = "Order the best 20 anew by this cross-encoder of sentence-transformers."
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for command in (index, serve, search):
        app.command()(command)


def index(
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            help="JSON lines, plain, .gz or .zst: id and contents (wiki-18, FlashRAG), or _id, title and text "
            "(BEIR, also its folder).",
        ),
    ],
    folder: Folder,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Also keep vectors, by: lsa (trained on the corpus, no GPU), wordllama, static:FOLDER (shape of "
            "model2vec), or a model of sentence-transformers such as intfloat/e5-base-v2."
        ),
    ] = None,
    vectors: Annotated[str, typer.Option(help="How to keep them: flat (exact), ivf or hnsw.")] = "flat",
    dimension: Annotated[int, typer.Option(help="Numbers per vector of lsa.")] = 256,
    batch: Annotated[int, typer.Option(help="Passages encoded at a time.")] = 256,
    k1: Annotated[float, typer.Option(help="BM25: how soon repeated words stop to count.")] = 0.9,
    b: Annotated[float, typer.Option(help="BM25: how much long passages are held back, 0 to 1.")] = 0.4,
    query_prefix: Annotated[
        str | None, typer.Option(help="Text before queries; by default that of E5 for E5.")
    ] = None,
    passage_prefix: Annotated[
        str | None, typer.Option(help="Text before passages; by default that of E5 for E5.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Index a corpus of any size, for llds serve, or for retrieval.corpus=INDEX.

    Call the same command again to go on after a stop.
    """
    from llds.retrieval.build import IndexOptions, build_index
    from llds.training.progress import make_display

    options = IndexOptions(
        k1=k1,
        b=b,
        encoder=encoder,
        vectors=cast(Any, vectors),
        dimension=dimension,
        batch=batch,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
    )
    with make_display(sys.stderr) as display:
        count = build_index(corpus, folder, options, display)
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    if as_json:
        typer.echo(json.dumps({"folder": folder, "passages": count, "bytes": size, "encoder": encoder}))
    else:
        typer.echo(f"{folder}: {count} passages, {size / 1e6:.0f} MB. Serve it: llds serve {folder}")


def serve(
    folder: Folder,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(help="Processes that share the index.")] = 1,
    mode: Annotated[str, typer.Option(help=MODE_HELP)] = "auto",
    rerank: Annotated[str | None, typer.Option(metavar="MODEL", help=RERANK_HELP)] = None,
    token_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Ask clients for this token; else $LLDS_RETRIEVAL_TOKEN, if set."),
    ] = None,
    topk: Annotated[int, typer.Option(help="Passages when a request names no number.")] = 3,
    max_topk: Annotated[int, typer.Option(help="Most passages per query.")] = 100,
    max_queries: Annotated[int, typer.Option(help="Most queries per request.")] = 16_384,
    max_query: Annotated[int, typer.Option(help="Longest query, in characters.")] = 16_384,
    max_body: Annotated[int, typer.Option(help="Longest request, in bytes.")] = 32 << 20,
    max_pending: Annotated[int, typer.Option(help="Waiting queries per worker before it is busy.")] = 65_536,
    batch: Annotated[int, typer.Option(help="Queries searched at a time.")] = 256,
    seconds: Annotated[float, typer.Option(help="Longest time for one answer, in seconds.")] = 60.0,
) -> None:
    """Serve an index over Search-R1's protocol: POST /retrieve, GET /health, GET /metrics.

    The first line on stdout is the address. Ctrl-C or SIGTERM ends it, once what is under way is answered.
    """
    from llds.search.remote import read_token
    from llds.server.serving import serve as run_server
    from llds.server.settings import ServerSettings

    settings = ServerSettings(
        index=folder,
        mode=mode,
        rerank=rerank,
        host=host,
        port=port,
        workers=workers,
        token=read_token(token_file),
        topk=topk,
        max_body=max_body,
        max_queries=max_queries,
        max_query=max_query,
        max_topk=max_topk,
        max_pending=max_pending,
        batch=batch,
        seconds=seconds,
    )
    run_server(settings, _say_address)


def search(
    place: Annotated[
        str, typer.Argument(metavar="INDEX", help="The index folder, or the address of a server.")
    ],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for, in quotes.")],
    topk: Annotated[int, typer.Option(min=1, help="Passages to show.")] = 3,
    mode: Annotated[str, typer.Option(help=MODE_HELP)] = "auto",
    rerank: Annotated[str | None, typer.Option(metavar="MODEL", help=RERANK_HELP)] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Token of a server; else $LLDS_RETRIEVAL_TOKEN.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search an index, or a server, once and show what is found."""
    from llds.search.remote import HTTPRetriever, read_token

    if place.startswith(("http://", "https://")):
        found = HTTPRetriever(place, token=read_token(token_file)).search([query], topk)[0]
    else:
        from llds.retrieval.opening import open_index
        from llds.retrieval.rerank import CrossEncoderScorer

        scorer = None if rerank is None else CrossEncoderScorer(rerank)
        found = open_index(place, cast(Any, mode), scorer).search([query], topk)[0]
    if as_json:
        rows = [{"id": p.id, "title": p.title, "text": p.text, "score": p.score} for p in found]
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    for place_in_list, passage in enumerate(found, start=1):
        typer.echo(
            f"{place_in_list}. {passage.title}  [{passage.id}, {passage.score:.4f}]\n   {passage.text}"
        )
    if not found:
        typer.echo("Nothing was found.")


def _say_address(url: str) -> None:
    typer.echo(url)
    sys.stdout.flush()
