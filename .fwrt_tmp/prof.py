import copy, time, torch
from tests.gpu.test_runtime_gpu import *
from fusewright.runtime import call, guard
case = gemm_add_relu(); bundle = cuda_bundle(case); eager = case.model.cuda()
fast = module.optimized(copy.deepcopy(eager), module.load(bundle, build.load(build.build(bundle.source))))
x = torch.randn(8,3,device='cuda'); m = fast.__dict__['_fw_engine'].modes[0]
T = m.gather(fast,(x,)); D=[t.detach() for t in T]
us = microseconds
def show(n,f): print(f'{n:28s}{us(f):8.2f}')
for _ in range(2):
    show('bare inference', lambda: m.inference(*D))
    show('misfit', lambda: m.misfit(*T)); show('altered', lambda: guard._fw_altered(fast,m.owners)); show('watcher', lambda: guard._fw_watcher((x,))); show('autocast', lambda: guard._fw_autocast('cuda'))
    show('bind', lambda: call._fw_bind(m,fast,(x,),{}))
    with torch.no_grad(): show('fast no_grad', lambda: fast(x))
    show('fast grad', lambda: fast(x))
    show('_fw_apply', lambda: call._fw_apply(m,*T)); show('Function.apply', lambda: call._FwFunction.apply(m,*T))
    r=m.inference(*D)
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, mode, *t): return mode.inference(*t)
        @staticmethod
        def backward(ctx,*g): return None
    show('plain Function, no save', lambda: F.apply(m,*T))
    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *t): return t[0].detach()
        @staticmethod
        def backward(ctx,*g): return None
    show('empty Function', lambda: G.apply(*T)); show('detach', lambda: x.detach())
    show('mm', lambda: torch.ops.aten.mm.default(D[0],D[1].t())); 
    sp=m.inference.__globals__; mm=torch.randn(8,5,device='cuda')
    show('wrapper', lambda: sp['custom_add_relu'](mm,D[2],8))
    show('eager grad', lambda: eager(x))
