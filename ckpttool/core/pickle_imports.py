"""Classify what a pickle imports by its name alone: torch's own, harmless, dangerous (runs code) or
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from ckpttool.core.dtypes import BY_NAME, BY_STORAGE
from ckpttool.core.text import Note, plural, some
from ckpttool.core.values import dataclass

OWN, KNOWN, UNKNOWN, DANGEROUS = "own", "known", "unknown", "dangerous"
UNREADABLE = "(unreadable pickle)"  # in place of the imports of a pickle that cannot be read
VERDICTS = (DANGEROUS, UNKNOWN, KNOWN)  # in the order in which they are listed; `OWN` is not listed


@dataclass(frozen=True, slots=True)
class Import:
    """A class or function that a pickle imports, and what the pickle does with it.

    `verdict` is ``dangerous`` (it runs code, or reaches files, processes or the network), ``known``
    (harmless) or ``unknown``. The pickle is in the record `member` of the archive `file` (an empty
    string: the file itself), `offset` is the byte of the pickle where the import is. `calls` are
    its calls with their arguments, shortened, `called` is their number. The pickle is in the bytes
    `start` to `end` of the file. If `name` is `UNREADABLE`, `reason` says why.
    """

    name: str
    verdict: str
    file: str
    member: str
    offset: int
    calls: tuple[str, ...] = ()
    called: int = 0
    start: int = 0
    end: int = 0
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.member or self.file}, byte {self.offset:,}"

    def is_in(self, path: str, offset: int, length: int) -> bool:
        """Return whether its pickle has bytes in this range of the file at `path`."""
        return path == self.file and offset < self.end and self.start < offset + length


def in_order(imports: Iterable[Import]) -> tuple[Import, ...]:
    """Return the imports: dangerous, unknown, known; each group by name, and within a name in file
    order.
    """
    distinct = dict.fromkeys(imports)
    return tuple(sorted(distinct, key=lambda each: (VERDICTS.index(each.verdict), each.name)))


def dangerous(imports: Iterable[Import]) -> tuple[Import, ...]:
    return tuple(imported for imported in imports if imported.verdict == DANGEROUS)


def note_on_dangerous(imports: Iterable[Import], source: str = "") -> tuple[Note, ...]:
    """Return a warning of what runs code if a file is loaded without care; with `source`, which
    file that is.
    """
    names = list(dict.fromkeys(imported.name for imported in dangerous(imports)))
    if not names:
        return ()
    count = plural(len(names), "dangerous import")
    has = f"{source} has {count}" if source else count
    text = f"{has}, executed if it is loaded with weights_only=False: {some(names)}"
    return (Note(text, "dangerous-import"),)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Modules of which every function counts, those inside them too. Most run code, import or start
# something; others read and write files, or talk to other machines.
_MODULES = _words(
    """
    os posix nt posixpath ntpath sys subprocess _posixsubprocess _winapi commands popen2 pexpect
    pipes pty tty fcntl importlib imp _imp _frozen_importlib _frozen_importlib_external runpy
    pkgutil zipimport codeop compileall py_compile types marshal ctypes _ctypes cffi _cffi_backend
    multiprocessing _multiprocessing concurrent threading _thread _threading_local asyncio _asyncio
    signal _signal _interpreters _xxsubinterpreters socket _socket ssl _ssl socketserver http urllib
    urllib2 urllib3 httplib httplib2 httpx requests aiohttp ftplib smtplib telnetlib poplib imaplib
    nntplib xmlrpc wsgiref webbrowser antigravity select selectors shutil tempfile glob fileinput
    linecache io _io _pyio bdb pdb cProfile _lsprof timeit doctest unittest pydoc inspect pickle
    _pickle cPickle dill cloudpickle joblib shelve dbm sqlite3 _sqlite3 mmap gc atexit faulthandler
    site venv ensurepip pip setuptools pkg_resources distutils idlelib lib2to3 test.support
    test.libregrtest zipapp zipfile tarfile gzip bz2 lzma readline rlcompleter tkinter _tkinter
    curses _osx_support _aix_support sysconfig syslog winreg _winreg msilib nturl2path jsonpickle
    IPython ipykernel pytest _pytest profile trace uuid _pyrepl paramiko fabric logging.config
    logging.handlers numpy.f2py numpy.testing ckpttool fickling picklescan modelscan modelaudit
    numpy.distutils numpy.ctypeslib numpy.lib.npyio numpy.lib._npyio_impl torch.hub torch.package
    torch.multiprocessing torch._inductor torch._dynamo torch.ops torch.classes torch._ops
    torch._classes torch.utils.cpp_extension torch.utils.bottleneck torch.utils.collect_env
    torch.utils.model_zoo torch.utils.tensorboard torch.utils.benchmark torch.utils.hipify
    torch.utils.data.datapipes.utils torch.utils._config_module torch.utils._import_utils
    torch.jit.unsupported_tensor_ops torch.distributed.run torch.distributed.launch
    torch.distributed.launcher torch.distributed.elastic torch.distributed.rpc
    torch.fx.experimental.symbolic_shapes
    """
)
_NAMES = {
    "builtins": """\
        eval exec execfile compile open file getattr setattr delattr hasattr __import__
        __build_class__
        reload breakpoint input raw_input globals locals vars dir apply help exit quit map
        filter""",
    "code": "interact InteractiveConsole InteractiveInterpreter compile_command",
    "operator": "attrgetter itemgetter methodcaller call setitem delitem getitem",
    "_operator": "attrgetter itemgetter methodcaller call setitem delitem getitem",
    "functools": "partialmethod reduce",
    "_functools": "reduce",
    "itertools": "starmap accumulate",
    "codecs": "open register lookup EncodedFile StreamReaderWriter StreamRecoder",
    "copyreg": "add_extension pickle constructor",
    "weakref": "finalize WeakMethod",
    "contextlib": "ExitStack AsyncExitStack redirect_stdout",
    "logging": "FileHandler basicConfig",
    "platform": "popen _syscmd_file _syscmd_ver",
    "yaml": "load load_all unsafe_load unsafe_load_all full_load full_load_all",
    "numpy": "load save savez loadtxt genfromtxt fromfile memmap fromregex savetxt DataSource"
    " vectorize frompyfunc",
    "pandas": "read_pickle eval read_csv read_json read_hdf to_pickle",
    "torch": "load save compile jit hub ops classes utils package",
    "torch.serialization": "load _load _legacy_load save _save add_safe_globals"
    " set_default_load_endianness",
    "torch.jit": "load script trace CompilationUnit _load_for_lite_interpreter",
    "torch.jit._serialization": "load",
    "torch.fx.graph_module": """\
        GraphModule reduce_graph_module reduce_package_graph_module reduce_deploy_graph_module
        _deserialize_graph_module _exec_with_source _forward_from_src _method_from_src""",
    "torch.fx._lazy_graph_module": "_make_graph_module reduce_graph_module"
    " reduce_package_graph_module",
    "torch.fx": "GraphModule",
    "torch._C": "PyTorchFileReader PyTorchFileWriter import_ir_module import_ir_module_from_buffer",
    "torch.export": "load save",
    "torch._export.serde.serialize": "deserialize_torch_artifact",
}
_FUNCTIONS = {module: _words(names) for module, names in _NAMES.items()}
# A dotted name that passes through one of these leaves the module that it seems to come from.
_DETOURS = _words(
    """
    os posix nt sys subprocess importlib builtins __builtin__ pickle ctypes shutil socket runpy
    """
)

_CONTAINERS = _words("set frozenset list dict tuple bytearray slice range xrange")
_SCALARS = _words("int float str bytes complex bool unicode long")
_PYTHON = {
    "collections": _words("OrderedDict defaultdict Counter deque"),
    "builtins": _CONTAINERS | _SCALARS,
    "__builtin__": _CONTAINERS | _SCALARS,  # its name in pickles that Python 2 can read
    "_codecs": frozenset(("encode",)),
}
_HARMLESS = {
    "builtins": "object NotImplemented Ellipsis",
    "copyreg": "_reconstructor __newobj__ __newobj_ex__",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID SafeUUID",
    "pathlib": "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath",
    "types": "SimpleNamespace MappingProxyType NoneType",
    "array": "array _array_reconstructor",
    "io": "BytesIO StringIO",
    "_io": "BytesIO StringIO",
    "logging": "getLogger",
    "collections": "UserDict UserList UserString",
    "numpy": """\
        dtype ndarray bool_ bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32
        float64
        complex64 complex128 str_ bytes_ longlong ulonglong intc uintc longdouble""",
    **dict.fromkeys(("numpy.core.multiarray", "numpy._core.multiarray"), "_reconstruct scalar"),
    **dict.fromkeys(("numpy.core.numeric", "numpy._core.numeric"), "_frombuffer"),
    "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._sfc64": "SFC64",
}
_DATA = {module: _words(names) for module, names in _HARMLESS.items()}
_DATA["pathlib._local"] = _DATA["pathlib"]

_SPECIAL = re.compile(r"__.+__", re.DOTALL)
_CLASS = re.compile(r"_*[A-Z][A-Za-z0-9_]*")
_TORCH_CLASSES = re.compile(
    r"torch\.(nn\.(parameter|modules|utils|parallel|quantized|quantizable|intrinsic|qat)|ao|quantization|optim|amp|sparse"
    r"|cuda\.amp|cuda\.sparse|distributions|masked|nested|storage|torch_version|_subclasses|_tensor"
    r"|distributed\.(tensor|_tensor|_shard(?!\.checkpoint)|device_mesh|(_shard\.)?checkpoint\.(metadata|planner)|fsdp"
    r"|remote_device))(\.(?!(\w*fx|\w*pt2e|quantizer|experimental|debug)\b)\w+)*"
)
# Classes that these modules import from elsewhere: under their own names they are not torch's own
# data.
_IMPORTED = _words(
    """
    ActivationWrapper AsyncCollectiveTensor BackwardHook C10dBackend CapturedTraceback
    ConstantIntNode CreationMeta CustomClassBase DispatchKey DispatchKeySet ExceptionWrapper
    ExitStack FakeProcessGroup FakeScriptObject Function GraphModule GroupMember GroupName
    GuardOnDataDependentSymNode InvalidVersion Join JoinHook Joinable LazyString LocalTensor
    LocalTensorMode MissingOpProfile Node OpOverload OpOverloadPacket OpaqueBase ProcessGroup RRef
    ReduceOp ReferenceType RemovableHandle SDPAParams SDPBackend SampleInput SchemaArgType
    SchemaArgument SchemaInfo Scope StorageWeakRef SymBool SymFloat SymInt SymNode
    TorchBindOpOverload TorchDispatchMode TorchFunctionMode TraceableWrapperSubclass TransformType
    TreeSpec Variable Version WeakIdKeyDictionary WeakTensorKeyDictionary Work
    _DTensor_OpSchema_post_init _DTensor_OpSchema_recompute_comparison_key _FlatLayout _MeshLayout
    _MultiHandle _State
    """
)
_ACTIVATIONS = _words(
    """
    relu relu6 gelu silu mish tanh sigmoid softmax log_softmax leaky_relu elu selu celu softplus
    softsign hardtanh hardswish hardsigmoid glu logsigmoid prelu rrelu softmin tanhshrink hardshrink
    softshrink
    """
)
_TORCH = {
    "torch": frozenset(BY_NAME)
    | frozenset(BY_STORAGE)
    | _words(
        """
    Size device dtype layout memory_format Tensor Generator ScriptObject strided sparse_coo
    sparse_csr sparse_csc sparse_bsr sparse_bsc contiguous_format channels_last channels_last_3d
    preserve_format per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric
    per_channel_affine_float_qparams _mkldnn
    """
    )
    | _ACTIVATIONS,
    "torch.nn.functional": _ACTIVATIONS,
    "torch._C._nn": _ACTIVATIONS,
    "torch.serialization": frozenset(("_get_layout",)),
    "torch._C": frozenset(
        ("Generator", "ScriptObject", "Size", "device", "dtype", "layout", "memory_format")
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch._tensor": frozenset(("_rebuild_from_type", "_rebuild_from_type_v2")),
    # What `torch.load(weights_only=True)` allows besides (`torch.serialization.add_safe_globals` in
    # torch itself), and what no pattern below covers: device meshes since torch 2.10, jagged
    # tensors, and dimensions that may vary.
    "torch.distributed._mesh_layout": frozenset(("_FlatLayout", "_MeshLayout")),
    "torch.nested._internal.nested_tensor": frozenset(("_rebuild_njt",)),
    "torch._dynamo.decorators": frozenset(("_DimRange",)),
    "torch.jit._pickle": _words(
        """
    build_intlist build_tensorlist build_doublelist build_boollist build_tensor_from_id
    restore_type_tag
    """
    ),
}
_TENSOR_TYPE = re.compile(
    r"(BFloat16|Bool|Byte|Char|Complex(?:Double|Float)|Double|Float|Half|Int|Long|Short)(Tensor|Storage)"
)


@lru_cache(maxsize=4096)
def verdict(module: str, name: str) -> str:
    """Return ``own`` (torch's own data, Python's containers), ``known``, ``unknown`` or
    ``dangerous``.
    """
    of_name = _verdict(module, name)
    if of_name in (OWN, DANGEROUS):
        return of_name
    # what Python 3 imports for a name of Python 2
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return _verdict(module, name)


def _verdict(module: str, name: str) -> str:
    if name in _PYTHON.get(module, ()) or name in _TORCH.get(module, ()):
        return OWN
    if module in ("torch", "torch.cuda") and _TENSOR_TYPE.fullmatch(name):
        return OWN
    if name in _DATA.get(module, ()):
        return KNOWN
    if module == "builtins" and name.endswith(("Error", "Exception", "Warning")):
        return KNOWN
    if _is_dangerous(module, name):
        return DANGEROUS
    if module == "torch._utils" and name.startswith("_rebuild_") and "." not in name:
        return OWN
    if module.startswith("__torch__"):  # a class of TorchScript code, which is not Python
        return OWN
    is_class = _CLASS.fullmatch(name) is not None
    if is_class and _TORCH_CLASSES.fullmatch(module) and name not in _IMPORTED:
        return OWN
    return KNOWN if is_class and module == "numpy.dtypes" else UNKNOWN


def _is_dangerous(module: str, name: str) -> bool:
    steps = name.split(".")
    if not _DETOURS.isdisjoint(steps) or any(map(_SPECIAL.fullmatch, steps)):
        return True
    if not _MODULES.isdisjoint(accumulate(module.split("."), "{}.{}".format)):
        return True
    if steps[0] in _FUNCTIONS.get(module, ()):
        return True
    return module.startswith("pathlib") and len(steps) > 1
