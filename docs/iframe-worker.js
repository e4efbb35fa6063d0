// Browsers do not start workers on pages opened from disk, so that the search of the site would find nothing there. This runs
// the worker's script in a hidden frame instead. Pages from a server use the browser's own workers.

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const base = new URL(url, location.href)
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          script.src = new URL(address, base)
          script.onload = resolve
          script.onerror = () => reject(new Error(`cannot load ${script.src}`))
          inside.document.body.append(script)
        })
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data })
        this.dispatchEvent(message)
        this.onmessage?.(message)
      }
      this.loaded = load(base)
    }

    postMessage(data) {
      this.loaded.then(() => {
        const inside = this.frame.contentWindow
        inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      })
    }

    terminate() {
      this.frame.remove()
    }
  }
}
