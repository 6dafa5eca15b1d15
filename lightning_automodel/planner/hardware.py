"""What accelerators can do: data from their makers' data sheets, in decimal bytes and FLOPs per second and device."""

from dataclasses import dataclass, replace

GIGA, TERA, MIB = 10**9, 10**12, 2**20


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device of a cluster of nodes.

    Attributes:
        name: of the device.
        flops: of matrix products in bfloat16, dense, without sparsity.
        memory: bytes that the driver reports.
        memory_bandwidth: of its own memory.
        inside: bytes that a device sends to others of its node.
        across: bytes that a device sends to other nodes, by a network interface of its own.
        devices: of a node.
        price: US dollars per device and hour; assumed, since it depends on the contract.
        matmul_share: of ``flops`` that large matrix products reach; assumed.
        memory_share: of ``memory_bandwidth`` that other operations reach; assumed.
        latency: seconds before a collective moves its first byte; assumed.
    """

    name: str
    flops: float
    memory: int
    memory_bandwidth: float
    inside: float
    across: float
    price: float
    devices: int = 8
    matmul_share: float = 0.7
    memory_share: float = 0.8
    latency: float = 15e-6


_DATA_SHEETS = (
    # name, TFLOP/s, MiB, and GB/s of the memory, inside a node, across nodes; US dollars
    # NVIDIA A100 80GB SXM data sheet, 2022: NVLink 3 has 600 GB/s both ways; DGX A100: 8 x 200 Gb/s.
    ("a100", 312, 81920, 2039, 300, 25, 1.8),
    # NVIDIA H100 SXM data sheet, 2023: 989 TFLOP/s without sparsity, NVLink 4 900 GB/s; DGX H100: 8 x 400 Gb/s.
    ("h100", 989.4, 81559, 3350, 450, 50, 3.0),
    # NVIDIA H200 SXM data sheet, 2024; DGX H200: 8 x 400 Gb/s.
    ("h200", 989.4, 143771, 4800, 450, 50, 3.8),
    # NVIDIA DGX B200 data sheet, 2024: 72 PFLOP/s in FP8 with sparsity over 8, a quarter of it dense bfloat16.
    ("b200", 2250, 183359, 8000, 900, 50, 5.5),
    # NVIDIA L40S data sheet, 2023: 362 TFLOP/s without sparsity; no NVLink: PCIe 4.0 x16 has 32 GB/s in each direction.
    ("l40s", 362, 46068, 864, 32, 12.5, 1.0),
)
HARDWARE = {
    name: Hardware(
        name=name,
        flops=flops * TERA,
        memory=memory * MIB,
        memory_bandwidth=own * GIGA,
        inside=inside * GIGA,
        across=across * GIGA,
        price=price,
    )
    for name, flops, memory, own, inside, across, price in _DATA_SHEETS
}


def find_hardware(name: str, price: float | None = None) -> Hardware:
    """Return the device of this name, at another ``price`` if one is given.

    Raises:
        ValueError: for a name that is not known, and a price below 0.
    """
    if name not in HARDWARE:
        raise ValueError(f"gpu={name!r} is not known; use one of {', '.join(HARDWARE)}")
    if price is not None and not 0 <= price < float("inf"):
        raise ValueError(
            f"price={price} is not US dollars per device and hour; give a number from 0 on, or leave it out"
        )
    return HARDWARE[name] if price is None else replace(HARDWARE[name], price=price)


def hardware_of(name: str) -> Hardware | None:
    """Return the device that the driver calls ``name``; ``None`` for one that is not known.

    Cards of another form (PCIe, NVL) are slower under the same number, and are not taken for those of the data sheets.
    """
    words = name.upper().replace("-", " ").split()
    slower = {"PCIE", "NVL"} & set(words)
    return next((device for key, device in HARDWARE.items() if key.upper() in words and not slower), None)
