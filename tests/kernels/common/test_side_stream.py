"""A stream beside the current one, launched and captured."""

import pytest
import torch

from alspec.kernels.common.side_stream import SideStream


def test_launches_beside_others_are_joined(device: torch.device) -> None:
    side, left, right = SideStream(device), torch.zeros(3, device=device), torch.zeros(3, device=device)
    left += 1
    with side.fork():
        right += 2 * left
    side.join()
    assert (left + right).tolist() == [3.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("forks", [True, False])
def test_a_captured_graph_waits_for_its_own_forks_alone(forks: bool) -> None:
    """A stream that did other work before is not part of the capture."""
    device = torch.device("cuda")
    side, left, right = SideStream(device), torch.zeros(3, device=device), torch.zeros(3, device=device)
    with side.fork():
        right += 1
    side.join()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        left += 1
        if forks:
            with side.fork():
                right += left
        side.join()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert left.tolist() == [2.0] * 3
    assert right.tolist() == [4.0 if forks else 1.0] * 3
